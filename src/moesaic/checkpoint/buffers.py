"""Memory for tensors that is used again.

Most of the time of reading a large tensor is the kernel handing out fresh pages: measured, 1.2 GB/s into new memory and
5 to 13 GB/s into memory used before. So large tensors live in blocks that return here when the tensor is freed.
"""

import mmap
import threading
import weakref
from collections import deque

import numpy as np

SMALL_BYTES = 1 << 20
"""Below this the allocator of the C library does the same."""

_HUGE_PAGE = 2 << 20


class BufferPool:
    """Blocks of anonymous memory; at most `idle_bytes` are kept while nobody uses them."""

    def __init__(self, idle_bytes: int):
        self._idle_bytes = idle_bytes
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()
        # Filled by finalizers, which may run anywhere, even inside `take`: so they never wait for the lock.
        self._returned: deque[mmap.mmap] = deque()

    def take(self, nbytes: int) -> np.ndarray:
        """A writable uint8 array of `nbytes` with any content; its block comes back when the array is freed."""
        with self._lock:
            self._collect()
            block = self._best(nbytes)
        if block is None:
            # Private: shared memory is not what `ulimit -d` counts, and seldom gets huge pages.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            block = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, flags=flags)
            block.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(block, dtype=np.uint8, count=nbytes)
        weakref.finalize(array, self._give_back, block).atexit = False
        return array

    def _give_back(self, block: mmap.mmap) -> None:
        self._returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _best(self, nbytes: int) -> mmap.mmap | None:
        fitting = [block for block in self._idle if nbytes <= len(block) <= max(2 * nbytes, _HUGE_PAGE)]
        if not fitting:
            return None
        best = min(fitting, key=len)
        self._idle.remove(best)
        return best

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        while sum(map(len, self._idle)) > self._idle_bytes:
            self._idle.pop(0)


POOL = BufferPool(idle_bytes=128 << 20)
"""The one that `read_tensor` uses."""
