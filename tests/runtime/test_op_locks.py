import os
import time

from dsft.runtime.op_locks import OLD_SECONDS, remove_old_locks


def test_only_locks_that_are_old_and_held_by_nobody_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    locks = {name: tmp_path / name / "lock" for name in ("old", "held", "young")}
    for lock in locks.values():
        lock.parent.mkdir()
        lock.touch()
    long_ago = time.time() - OLD_SECONDS - 60
    os.utime(locks["old"], (long_ago, long_ago))
    os.utime(locks["held"], (long_ago, long_ago))
    with locks["held"].open():
        assert remove_old_locks() == [locks["old"]]
    assert not locks["old"].exists() and locks["held"].exists() and locks["young"].exists()
