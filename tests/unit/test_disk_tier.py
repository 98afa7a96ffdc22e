"""Prefixes on disk: a restart finds them; whatever happens to a folder, no token is wrong and the limit holds."""

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paged_kv.engine import disk_tier
from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.engine.page_file import metadata_of, pack
from paged_kv.engine.requests import Sampling
from paged_kv.errors import ContractError, ContractTypeError
from support.fake_model import VOCAB, FakeModel, alone
from unit.disk_folders import bytes_in

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 300).tolist()
FIVE = Sampling(5)


def engine_on(folder, *, pages=200, page_size=8, limit=1 << 20, model=None, **options):
    return Engine(model or FakeModel(pages, page_size), disk=DiskTier(folder, limit), **options)


def answered(engine, prompt=PROMPT, namespace=None):
    return [token for output in engine.stream(prompt, FIVE, namespace=namespace) for token in output.tokens]


def written(folder, prompt=PROMPT, namespace=None, **options):
    """Answers in an engine that then ends."""
    engine = engine_on(folder, **options)
    assert answered(engine, prompt, namespace) == alone(prompt, FIVE)
    engine.flush()


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("max_step_tokens", [37, 2048])
def test_a_restarted_engine_computes_only_what_no_full_page_has(tmp_path, page_size, max_step_tokens):
    options = {"page_size": page_size, "pages": 400, "max_step_tokens": max_step_tokens}
    written(tmp_path / "made" / "here", **options)
    engine = engine_on(tmp_path / "made" / "here", **options)
    assert answered(engine) == alone(PROMPT, FIVE)
    assert engine.tokens_restored == 299 // page_size * page_size
    assert engine.model.computed == 300 - engine.tokens_restored + 4
    longer = [*PROMPT, *alone(PROMPT, FIVE), 1, 2, 3]  # what it said is in pages too
    restarted = engine_on(tmp_path / "made" / "here", **options)
    assert answered(restarted, longer) == alone(longer, FIVE)
    assert restarted.tokens_restored == 304 // page_size * page_size
    assert (tmp_path / "made" / "here").stat().st_mode & 0o777 == 0o700


def test_pages_that_left_the_pool_come_back_from_disk(tmp_path):
    engine = engine_on(tmp_path, pages=45)
    for _ in range(2):
        for first in range(4):
            prompt = [first, *PROMPT]
            assert answered(engine, prompt) == alone(prompt, FIVE)
            engine.flush()
    assert engine.tokens_found == 0
    assert engine.tokens_restored == 4 * 296
    engine.pool.check_integrity()


@pytest.mark.parametrize("other", ["digest", "kernels", "page_size", "namespace"])
def test_pages_of_another_model_kernel_size_or_namespace_are_not_found(tmp_path, other):
    written(tmp_path)
    model = FakeModel(200, 4 if other == "page_size" else 8)
    if other in ("digest", "kernels"):
        setattr(model, other, "another")
    engine = engine_on(tmp_path, model=model)
    assert answered(engine, namespace="a" if other == "namespace" else None) == alone(PROMPT, FIVE)
    assert engine.tokens_restored == 0


@pytest.mark.parametrize(
    "name", ["tenant", b"\xff", 7, True, ("a", 1), "\ud800", (), pytest.param(10**1000, id="large")]
)
def test_a_namespace_with_a_plain_name_is_found_again(tmp_path, name):
    written(tmp_path, namespace=name)
    engine = engine_on(tmp_path)
    answered(engine, namespace=name)
    assert engine.tokens_restored == 296


@pytest.mark.parametrize("name", [object(), frozenset("a"), 1.5, ("a", object()), pytest.param(10**5000, id="large")])
def test_what_no_other_process_could_name_is_not_kept(tmp_path, name):
    written(tmp_path, namespace=name)
    assert bytes_in(tmp_path, pages_only=True) == 0


def test_the_limit_is_held_and_the_chain_used_last_stays(tmp_path):
    written(tmp_path)
    each = bytes_in(tmp_path)
    limit = 3 * each
    for turn in range(8):
        written(tmp_path, [turn, *PROMPT[1:]], limit=limit)
        written(tmp_path, limit=limit)
        assert each < bytes_in(tmp_path) <= limit
    engine = engine_on(tmp_path, limit=limit)
    answered(engine)
    assert engine.tokens_restored == 296
    engine = engine_on(tmp_path, limit=each // 2)  # a lower limit counts at once; of a chain its end goes first
    engine.flush()
    assert bytes_in(tmp_path) <= each // 2
    answered(engine)
    assert 0 < engine.tokens_restored < 296 // 2


@pytest.mark.parametrize("others", [0, 1], ids=["the same engine", "another engine"])
def test_a_chain_that_is_used_again_stays(tmp_path, others):
    written(tmp_path)
    limit = bytes_in(tmp_path) * 5 // 2
    engines = [engine_on(tmp_path, limit=limit) for _ in range(1 + others)]
    first, second = engines[0], engines[-1]
    for engine, number in ((first, 0), (first, 1), (second, 0), (first, 2)):
        prompt = [number, *PROMPT[1:]]
        assert answered(engine, prompt) == alone(prompt, FIVE)
        engine.flush()
    for number in (0, 2):
        restarted = engine_on(tmp_path, limit=limit)
        answered(restarted, [number, *PROMPT[1:]])
        assert restarted.tokens_restored == 296
        restarted.flush()


def damage(file, rng):
    """One of the things that happen to files."""
    data = file.read_bytes()
    at, count = rng.randrange(len(data)), rng.randrange(1, 64)
    kinds = [
        lambda: data[:at],
        lambda: data + rng.randbytes(count),
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        lambda: data[:at] + rng.randbytes(len(data[at : at + count])) + data[at + count :],
        lambda: rng.choice(sorted(file.parent.glob("*.page"))).read_bytes(),  # another page's whole file
        lambda: data[: at % 8] + rng.randbytes(1) + data[at % 8 + 1 :],  # the length of the header
        lambda: bytes(len(data)),
    ]
    file.write_bytes(rng.choice(kinds)())


def test_damage_costs_time_and_changes_no_token(tmp_path):
    rng, restored, damaged, prompt = random.Random(5), [], 0, PROMPT[:150]
    expected_tokens = alone(prompt, FIVE)
    written(tmp_path, prompt)
    whole = {file: file.read_bytes() for file in sorted(tmp_path.glob("*.page"))}
    assert len(whole) == 19
    for _ in range(int(os.environ.get("PAGED_KV_DAMAGES", "300"))):
        for file, data in whole.items():
            if not file.exists() or file.read_bytes() != data:
                file.write_bytes(data)
        for file in rng.sample(list(whole), rng.choice([1, 1, 2, 9])):
            damage(file, rng)
        damaged += any(file.read_bytes() != data for file, data in whole.items())
        engine = engine_on(tmp_path, pages=30)
        assert answered(engine, prompt) == expected_tokens
        restored.append(engine.tokens_restored)
        engine.flush()
    assert len(set(restored)) == 19
    assert sum(found < 144 for found in restored) > 0.8 * damaged  # the others harmed the page of what it said
    assert not engine._disk.off
    for _ in range(10):  # what is damaged is found in the order of the pages, and then written again
        if engine.tokens_restored == 144:
            break
        engine = engine_on(tmp_path)
        answered(engine, prompt)
        engine.flush()
    assert engine.tokens_restored == 144


def test_a_whole_file_that_says_what_is_not_so_is_not_read(tmp_path):
    """Each has a checksum that fits; it lies of its tokens, of the page before it, or of its kind."""
    written(tmp_path)
    disk = engine_on(tmp_path)._disk
    chain = [disk.root(None)]
    disk.grow(chain, PROMPT, 2)
    file = tmp_path / f"{chain[2].hex()}.page"
    tokens, bits = np.array(PROMPT[8:16]), np.full((1, 8), 3, np.uint32)
    true = disk._metadata_of(chain[1], "page")
    assert len(pack(tokens, bits, true)) == file.stat().st_size
    for lying_tokens, metadata in (
        (tokens[::-1].copy(), true),
        (tokens, disk._metadata_of(chain[2], "page")),
        (tokens, true | {"model": "fakd"}),
        (tokens, true | {"kernels": "fakd"}),
        (tokens, metadata_of(disk._model)),
    ):
        file.write_bytes(pack(lying_tokens, bits, metadata))
        engine = engine_on(tmp_path)
        assert answered(engine) == alone(PROMPT, FIVE)
        assert engine.tokens_restored == 8
        engine.flush()
    file.write_bytes(pack(tokens, bits, true))
    assert answered(engine_on(tmp_path)) != alone(PROMPT, FIVE)  # the lie would be seen


def anybodys(path):
    path.write_bytes(path.parent.with_name("outside").read_bytes())
    path.chmod(0o666)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "anybody's"])
def test_what_is_not_a_page_is_not_read_nor_followed(tmp_path, kind):
    folder, outside = tmp_path / "tier", tmp_path / "outside"
    written(folder)
    disk = engine_on(folder)._disk
    disk.grow(chain := [disk.root(None)], PROMPT, 1)
    file = folder / f"{chain[1].hex()}.page"
    file.rename(outside)
    made = {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: path.symlink_to(outside), "anybody's": anybodys}
    made[kind](file)
    (folder / "notes.page").write_text("mine")
    content = outside.read_bytes()
    engine = engine_on(folder, limit=3000)
    assert answered(engine) == alone(PROMPT, FIVE)
    assert engine.tokens_restored == 0
    engine.flush()
    assert (folder / "notes.page").read_text() == "mine"
    assert outside.read_bytes() == content
    assert file.is_dir() == (kind == "folder")
    assert not engine._disk.off


def test_what_another_process_removed_is_written_again(tmp_path):
    engine = engine_on(tmp_path)
    answered(engine)
    engine.flush()
    before = bytes_in(tmp_path)
    for file in tmp_path.glob("*.page"):
        file.unlink()
    engine._pages.prefixes.clear()
    assert answered(engine) == alone(PROMPT, FIVE)
    engine.flush()
    assert bytes_in(tmp_path) > 0.97 * before  # but for the page behind the prompt, which nobody has missed yet


def test_what_a_killed_writer_left_is_removed(tmp_path):
    (tmp_path / "unfinished").write_bytes(bytes(10_000))
    written(tmp_path, limit=20_000)
    assert not (tmp_path / "unfinished").exists()
    assert bytes_in(tmp_path, pages_only=True) > 10_000


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_folder_within_its_limit(tmp_path):
    """Two write at once and both are killed at some moment, 20 times; the next ones find what they left."""
    program = [sys.executable, "-m", "unit.disk_folders", tmp_path, os.environ.get("PAGED_KV_KILLS", "20")]
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(program, env=path, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    restored, evicted, _ = map(int, done.stdout.split())
    assert restored > 100
    assert evicted > 3


def test_two_engines_share_a_folder(tmp_path):
    first, second = engine_on(tmp_path), engine_on(tmp_path)
    answered(first)
    first.flush()
    assert answered(second) == alone(PROMPT, FIVE)
    assert second.tokens_restored == 296
    other = [5, *PROMPT]
    answered(second, other)
    second.flush()
    assert answered(first, other) == alone(other, FIVE)
    assert first.tokens_restored == 296


@pytest.mark.parametrize("place", ["_write_all", "os.rename", "os.open"])
def test_a_disk_that_fails_turns_the_tier_off_with_one_warning(tmp_path, monkeypatch, place):
    written(tmp_path, PROMPT[:100])
    engine = engine_on(tmp_path)
    engine.flush()
    calls = [0]
    holder = disk_tier.os if "." in place else disk_tier
    works = getattr(holder, place.removeprefix("os."))

    def fails(*arguments, **folders):
        number = folders.get("src_dir_fd", folders.get("dir_fd", arguments[0]))
        if not isinstance(number, int) or not os.readlink(f"/proc/self/fd/{number}").startswith(str(tmp_path)):
            return works(*arguments, **folders)  # an engine of another test is not collected yet
        calls[0] += 1
        if place == "_write_all":
            os.write(arguments[0], arguments[1][:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(holder, place.removeprefix("os."), fails)

    def answers():
        for first in range(3):
            prompt = [first, *PROMPT]
            assert answered(engine, prompt) == alone(prompt, FIVE)
            engine.flush()

    with pytest.warns(RuntimeWarning, match=r"the disk tier in .* is off: .*No space") as caught:
        answers()
    assert sum(f"the disk tier in {tmp_path}" in str(each.message) for each in caught) == 1  # garbage may warn too
    assert calls[0] == 1
    monkeypatch.undo()
    assert not (tmp_path / "unfinished").exists()
    engine = engine_on(tmp_path)
    assert answered(engine) == alone(PROMPT, FIVE)
    assert engine.tokens_restored == 96


def test_a_folder_that_vanishes_turns_it_off(tmp_path):
    engine = engine_on(tmp_path / "gone")
    engine.flush()
    (tmp_path / "gone" / "lock").unlink()
    (tmp_path / "gone").rmdir()

    def answers():
        assert answered(engine) == alone(PROMPT, FIVE)
        engine.flush()

    with pytest.warns(RuntimeWarning, match="is off"):
        answers()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ContractError, match="has owner 12345"):
        engine_on(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_or_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o770)
    with pytest.raises(ContractError, match="no other user can write to"):
        engine_on(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    with pytest.raises(ContractError, match="is no folder"):
        engine_on(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="is off"):
        engine = engine_on(tmp_path / "file" / "below")
    assert answered(engine) == alone(PROMPT, FIVE)


@pytest.mark.parametrize(
    ("folder", "limit", "error", "name"),
    [
        (3, 10, ContractTypeError, "folder"),
        (b"x", 10, ContractTypeError, "folder"),
        ("", 10, ContractError, "folder"),
        ("a\0b", 10, ContractError, "folder"),
        ("x", 0, ContractError, "bytes"),
        ("x", 1.5, ContractTypeError, "bytes"),
    ],
)
def test_what_is_wrong_with_a_tier_is_refused(folder, limit, error, name):
    with pytest.raises(error, match=f"^{name}: expected"):
        DiskTier(folder, limit)


def test_what_is_wrong_with_an_engines_tier_is_refused(tmp_path):
    with pytest.raises(ContractTypeError, match=r"^disk: expected a DiskTier"):
        Engine(FakeModel(4, 4), disk=tmp_path)
    with pytest.raises(ContractError, match=r"^disk: .*share_prefixes"):
        engine_on(tmp_path / "new", share_prefixes=False)
    with pytest.raises(ContractError, match=r"^bytes: a page's file has \d+ bytes"):
        engine_on(tmp_path / "new", limit=100)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_writer_that_is_held_up_holds_no_step_up(tmp_path, monkeypatch):
    """Another process has the lock and keeps it."""
    monkeypatch.setattr(disk_tier, "LOCK_SECONDS", 1.0)
    monkeypatch.setattr(disk_tier, "QUEUE_BYTES", 5000)
    engine = engine_on(tmp_path)
    engine.flush()
    with open(tmp_path / "lock") as lock:
        disk_tier.fcntl.flock(lock, disk_tier.fcntl.LOCK_EX)
        worker = None
        for first in range(3):
            prompt = [first, *PROMPT]
            assert answered(engine, prompt) == alone(prompt, FIVE)
            worker = worker or engine._disk._worker
            assert engine._disk._queue.qsize() <= 2 * engine._disk._most_queued["page"] < 30
        assert worker is not None
        engine.flush()
    assert bytes_in(tmp_path, pages_only=True) == 0
    assert answered(engine, [7, *PROMPT]) == alone([7, *PROMPT], FIVE)
    engine.flush()
    assert bytes_in(tmp_path, pages_only=True) > 0  # what the queue had a place for
