"""A team of threads for the libraries of kernels, where the process has no OpenMP: they sleep when there is nothing
to do.

Each library has it; those of a process share the team of the first one that is loaded.
One call at a time has the team; another one that comes meanwhile runs on its own thread alone. A thread that wakes
after the work of a call is done takes no part in it, so a call never waits for a thread that has no CPU.
"""

from std.atomic import Atomic
from std.ffi import external_call

from .system_call import system_call

comptime Body = def(Int) thin abi("C") -> None
comptime Start = def(Int) thin abi("C") -> Int
comptime SPINS = 16384
"""The number of times that a thread looks for the next call before it sleeps: some 20 us."""
comptime SYS_FUTEX = 202
comptime FUTEX_WAIT = 128
comptime FUTEX_WAKE = 129


struct Team:
    """The state that all threads share; it lives as long as the process."""

    var calls: Atomic[Int32]
    """Counts calls: threads wait for it to change."""
    var busy: Atomic[Int32]
    """1 while a call has the team."""
    var seats: Atomic[Int32]
    """Threads that may still join the call."""
    var ended: Atomic[Int32]
    """Threads that have joined and are done: the caller waits for it to change."""
    var idle: Atomic[Int32]
    """Threads that sleep until a call comes, or are about to: without them no call asks the system to wake any."""
    var waiting: Atomic[Int32]
    """1 while the caller sleeps, or is about to."""
    var body: Int
    var shared: Int

    def __init__(out self):
        self.calls = Atomic[Int32](0)
        self.busy = Atomic[Int32](0)
        self.seats = Atomic[Int32](0)
        self.ended = Atomic[Int32](0)
        self.idle = Atomic[Int32](0)
        self.waiting = Atomic[Int32](0)
        self.body = 0
        self.shared = 0


comptime TeamPointer = Pointer[Team, MutUntrackedOrigin]


def team_at(address: Int) -> TeamPointer:
    var at = address
    return Pointer(to=at).unsafe_bitcast[TeamPointer]()[]


def run_body(body: Int, shared: Int):
    var function = body
    Pointer(to=function).unsafe_bitcast[Body]()[](shared)


def futex(word: Int, operation: Int, value: Int):
    _ = system_call(SYS_FUTEX, word, operation, value)


def wait_for_change(mut word: Atomic[Int32], seen: Int32, mut sleepers: Atomic[Int32]):
    """Returns once the word is no longer `seen`.

    Who changes it looks for sleepers afterwards, and who sleeps has counted itself before the system compares the word:
    one of the two sees the other.
    """
    for _ in range(SPINS):
        if word.load() != seen:
            return
    _ = sleepers.fetch_add(1)
    while word.load() == seen:
        futex(Int(Pointer(to=word)), FUTEX_WAIT, Int(seen))
    _ = sleepers.fetch_sub(1)


def wake(mut word: Atomic[Int32], count: Int, mut sleepers: Atomic[Int32]):
    """Wakes up to so many that sleep until a word changes, which it just has."""
    if sleepers.load() > 0:
        futex(Int(Pointer(to=word)), FUTEX_WAKE, count)


def serve(address: Int) abi("C") -> Int:
    """Serve calls, in each thread, until the process ends."""
    var team = team_at(address)
    while True:
        var seen = team[].calls.load()
        if team[].seats.fetch_sub(1) > 0:
            run_body(team[].body, team[].shared)
            _ = team[].ended.fetch_add(1)
            wake(team[].ended, 1, team[].waiting)
        wait_for_change(team[].calls, seen, team[].idle)


def start_team(threads: Int) -> Int:
    """Starts a team of so many threads beside the caller's; its address."""
    var memory = external_call["calloc", TeamPointer](1, 64)
    memory[] = Team()
    comptime body: Start = serve
    var function = body
    for _ in range(threads):
        var thread = 0
        var failed = external_call["pthread_create", Int32](
            Pointer(to=thread), Int(0), Pointer(to=function).unsafe_bitcast[Int]()[], Int(memory)
        )
        if failed == 0:
            _ = external_call["pthread_detach", Int32](thread)
    return Int(memory)


def run_team(body: Int, shared: Int, threads: UInt32, address: Int):
    """Runs `body(shared)` on up to so many threads of the team at an address, the caller's included."""
    var team = team_at(address)
    var others = Int32(threads) - 1
    var free = Int32(0)
    if others < 1 or not team[].busy.compare_exchange(free, 1):
        run_body(body, shared)
        return
    team[].body = body
    team[].shared = shared
    team[].ended.store(0)
    team[].seats.store(others)
    _ = team[].calls.fetch_add(1)
    wake(team[].calls, Int(others), team[].idle)
    run_body(body, shared)
    var left = team[].seats.load()
    while left > 0 and not team[].seats.compare_exchange(left, 0):
        pass
    var joined = others - max(left, Int32(0))
    var ended = team[].ended.load()
    while ended != joined:
        wait_for_change(team[].ended, ended, team[].waiting)
        ended = team[].ended.load()
    team[].busy.store(0)
