"""A storage backend that writes down what it acknowledged: for campaigns, loaded through SGLang's `dynamic` route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_tpusync.config import store_path
from sglang_tpusync.hicache import TpuSyncStorage
from tests.campaigns.journal import journal_of

__all__ = ["JournalStorage"]


class JournalStorage(TpuSyncStorage):
    """Appends the keys of each batch that was stored whole. A line is written only after the store has answered."""

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        before = self._num_failed()
        answer = super().batch_set_v1(keys, host_indices, extra_info)
        if all(answer) and self._num_failed() == before:
            with open(journal_of(store_path(self.options)), "ab", buffering=0) as file:
                file.write(b"".join(key.encode() + b"\n" for key in keys))
        return answer

    def _num_failed(self) -> int:
        """What was refused, and what faulted: True is answered for these, too."""
        counters = self.traffic.counters()
        return counters["pages_refused"] + counters["faults"]
