"""What running processes say of themselves, for tools of the same user on the node."""

from sglang_tpusync.observe.status import Status, Statuses, StatusWriter, read_statuses

__all__ = ["Status", "StatusWriter", "Statuses", "read_statuses"]
