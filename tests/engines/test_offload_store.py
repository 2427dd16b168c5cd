"""The file that the CPU offloads to: nothing is lost when it cannot grow, and nothing is believed that was changed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import memfit
from memfit.engines.offload_store import Extents, FileStore, OffloadedStorage, bytes_of, open_store
from memfit.errors import MissingFeatureError, OffloadError
from memfit.summed_file import page_sums
from tests.engines.engine_cases import run_steps
from tests.engines.offloading import bytes_left_away, gradients, offload_units, store_of
from tests.engines.test_exact import squares
from tests.engines.test_offload import WIDE, wide_step


@contextlib.contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    """A disk that is full, as this process sees it: writes beyond the limit fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def there_and_back(away: OffloadedStorage) -> torch.UntypedStorage:
    away.wait_sent()
    away.fetch()
    return away.wait_fetched()


@pytest.mark.parametrize("size_bytes", [1, 7, 4096, 4097, (8 << 20) - 3, (8 << 20) + 5])
def test_every_byte_comes_back(tmp_path: Path, size_bytes: int) -> None:
    store = FileStore(str(tmp_path))
    storage = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8).untyped_storage()
    back = there_and_back(store.send("unit", storage))
    assert back.data_ptr() != storage.data_ptr()
    assert torch.equal(bytes_of(back), bytes_of(storage))
    assert not os.listdir(tmp_path), "the file has no name that could stay"


def test_room_is_given_back_and_used_again(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    storages = [torch.zeros(5000 * n, dtype=torch.uint8).untyped_storage() for n in range(1, 9)]
    ends = set()
    for _ in range(5):
        away = [store.send("unit", each) for each in storages]
        for each in away:
            each.wait_sent()
        ends.add(store.extents.end)
        assert store.extents.used_bytes == store.extents.end
        del away, each
    assert len(ends) == 1 and not store.extents.used_bytes


def test_what_is_let_go_of_while_it_is_written_is_not_written_over(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    held = threading.Event()
    for _ in range(2):
        store.file  # noqa: B018, the threads start with it
        store.submit(held.wait)  # type: ignore[arg-type]
    first = store.send("unit", torch.ones(4096, dtype=torch.uint8).untyped_storage())
    del first  # its job still waits
    second = store.send("unit", torch.zeros(4096, dtype=torch.uint8).untyped_storage())
    assert store.extents.used_bytes == 2 * 4096
    held.set()
    assert not bytes_of(there_and_back(second)).any()


def test_extents_never_overlap_and_all_come_back() -> None:
    draw, extents = random.Random(0), Extents()
    taken: dict[int, int] = {}
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            offset = draw.choice(sorted(taken))
            extents.give_back(offset, taken.pop(offset))
        else:
            size = draw.randint(1, 20000)
            taken[extents.take(size)] = size
        ordered = sorted(taken.items())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ordered))
    end = extents.end
    for offset, size in taken.items():
        extents.give_back(offset, size)
    assert not extents.used_bytes and extents.take(end) == 0, "all of it is one piece again"


def test_sums_see_every_byte() -> None:
    content = np.random.default_rng(0).integers(0, 256, 3 * 4096 + 11, np.uint8)
    before = page_sums(content)
    for place in (0, 4095, 4096, len(content) - 1):
        content[place] ^= 1
        assert not np.array_equal(page_sums(content), before)
        content[place] ^= 1
    pages = content.copy()
    pages[:4096], pages[4096:8192] = content[4096:8192], content[:4096]
    assert not np.array_equal(page_sums(pages), before), "a page in the place of another"


def test_a_full_disk_is_a_clear_error_and_the_step_can_be_repeated() -> None:
    step = wide_step()
    step = memfit.Step(step.model, step.batch, loss=squares, optimizer=torch.optim.AdamW)
    made = offload_units(step, WIDE)
    model = copy.deepcopy(step.build_model())
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = step.build_optimizer(model), step.build_optimizer(plain)
    made.plan.apply(model, optimizer)
    run_steps(step, plain, plain_optimizer, steps=1)
    run_steps(step, model, optimizer, steps=1)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.zero_grad()
    for limit in (0, made.bytes["blocks.0"] // 2, made.bytes["blocks.0"] + 4096):
        with no_file_above(limit), pytest.raises(OffloadError) as caught:
            squares(model(step.batch), None).backward()
        text = str(caught.value)
        assert f"'{'blocks.1' if limit > made.bytes['blocks.0'] else 'blocks.0'}'" in text
        assert "256.00 KiB" in text and store_of(model).folder in text and "MEMFIT_OFFLOAD" in text
        del caught
        assert not bytes_left_away(model)
        assert all(parameter.grad is None for parameter in model.parameters())
        now = (model.state_dict(), optimizer.state_dict())
        assert all(torch.equal(state[0][name], now[0][name]) for name in now[0])
        assert str(state[1]) == str(now[1])
    one, other = run_steps(step, plain, plain_optimizer, steps=2), run_steps(step, model, optimizer, steps=2)
    assert all(map(torch.equal, one.losses, other.losses))
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of its own with so many bytes; called again it gets another size."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a file system can be mounted by root alone")
    mounted: list[bool] = []

    def resize(size_bytes: int) -> Path:
        options = f"size={size_bytes}{',remount' if mounted else ''}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)], capture_output=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
        mounted.append(True)
        return tmp_path

    yield resize
    if mounted:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_training_goes_on_when_a_disk_that_was_full_has_room(
    small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = wide_step()
    step = memfit.Step(step.model, step.batch, loss=squares, optimizer=torch.optim.AdamW)
    made = offload_units(step, WIDE)
    need = sum(made.bytes.values())
    monkeypatch.setenv("MEMFIT_OFFLOAD", str(small_disk(2 * need)))
    model = copy.deepcopy(step.build_model())
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = step.build_optimizer(model), step.build_optimizer(plain)
    made.plan.apply(model, optimizer)
    run_steps(step, plain, plain_optimizer, steps=1)
    run_steps(step, model, optimizer, steps=1)
    filler = small_disk(2 * need) / "filler"
    os.ftruncate(store_of(model).file, 0)  # the room that the step before gave back goes to another
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    model.zero_grad()
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"No space left.* 0 B are free there.*Nothing of the training"):
            squares(model(step.batch), None).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    filler.unlink()
    one, other = run_steps(step, plain, plain_optimizer, steps=2), run_steps(step, model, optimizer, steps=2)
    assert all(map(torch.equal, one.losses, other.losses))
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


def damage(file: int, size: int) -> None:
    os.pwrite(file, bytes(16), size // 2)


def truncate(file: int, size: int) -> None:
    os.ftruncate(file, size // 2)


@pytest.mark.parametrize(("change", "says"), [(damage, "other bytes"), (truncate, "ends")])
def test_a_file_that_was_changed_is_an_error_and_no_gradient(change: object, says: str) -> None:
    step = wide_step()
    model = copy.deepcopy(step.build_model())
    plain = copy.deepcopy(model)
    made = offload_units(step, WIDE)
    made.plan.apply(model)
    loss = squares(model(step.batch), None)
    store = store_of(model)
    change(store.file, os.fstat(store.file).st_size)  # type: ignore[operator]
    for _ in range(2):  # asking again does not help
        with pytest.raises(OffloadError, match=f"{says}.*zero_grad"):
            loss.backward(retain_graph=True)
    assert model.blocks[0].up.weight.grad is None
    del loss
    model.zero_grad()
    for each in (plain, model):
        squares(each(step.batch), None).backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))


def test_devices_without_a_way_to_the_host_are_refused() -> None:
    with pytest.raises(MissingFeatureError, match="xpu"):
        open_store("xpu")
