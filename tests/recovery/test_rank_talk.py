"""The thread that ends waits inside kernels when another rank leaves a notice."""

from __future__ import annotations

import threading
from pathlib import Path

import torch.distributed as dist

from memfit.recovery.rank_talk import _Watcher


def test_a_notice_in_the_store_is_heard_once_and_a_stopped_watcher_hears_none(tmp_path: Path) -> None:
    store = dist.PrefixStore("guard", dist.FileStore(str(tmp_path / "store"), 1))
    heard, unheard = threading.Event(), threading.Event()
    watcher, stopped = _Watcher(store, "fault/0", heard.set), _Watcher(store, "fault/0", unheard.set)
    stopped.stop()
    assert not heard.wait(0.6)
    store.set("fault/0", "rank 1 ran out of memory")
    assert heard.wait(10)
    watcher.stop()
    assert not unheard.is_set()
