"""Launches of one call that overlap: a grid starts before the one in front of it has ended, and waits for its results.

The launches of a call run on one stream: schedule, attention, combine. Without more, each starts when the one before has
ended and its writes are visible. On Hopper and later (programmatic dependent launch) a grid may start earlier:

    follows_closely()        attributes of the launch: it may start once every CTA of the grid before has called
                             `admit_next_launch` or has ended
    await_launch_before()    in the kernel, by every thread: waits until the grid before has ended, and its writes are
                             visible. Earlier it writes nothing, and reads nothing that the grid before writes

What a thread does before its wait overlaps with the grid before: its launch, the barriers of its shared memory. Since every
thread of a grid waits, its end means the end of the one before, too, and with it of all before that.

A grid admits only one that this package launches. The first launch of a call has no such attribute, the last admits none:
the neighbours on the stream are other people's kernels, which may not wait. Elsewhere all this is nothing.
"""

from max.gpu.host.launch_attribute import LaunchAttribute
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)


def follows_closely() -> List[LaunchAttribute]:
    """Attributes of a launch whose kernel calls `await_launch_before`, behind one that admits it."""
    return pdl_launch_attributes(PDLLevel.ON)


@always_inline
def admit_next_launch():
    """By every thread: the next grid on the stream, one with `follows_closely`, may start."""
    launch_dependent_grids()


@always_inline
def await_launch_before():
    """By every thread, before it writes, or reads what the grid before writes: waits for the end of that grid."""
    wait_on_dependent_grids()
