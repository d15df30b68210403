"""What the package raises. A miss is a value and never appears here.

TpuSyncError
├── ConfigError         a configured key or value is wrong; names key, value and what is allowed
├── UnsupportedError    this build, kernel, file system or SGLang cannot do it
├── HookError           a hook does not fit the installed SGLang
├── StorageError        the directory or a file of the store cannot be used
└── TransferError       a copy or a transfer failed
    ├── DeadlineError   it took longer than it was given
    └── CancelledError  the caller or a close asked it to stop
"""

from __future__ import annotations

__all__ = [
    "CancelledError",
    "ConfigError",
    "DeadlineError",
    "HookError",
    "StorageError",
    "TpuSyncError",
    "TransferError",
    "UnsupportedError",
]


class TpuSyncError(Exception):
    """The root of the family."""


class ConfigError(TpuSyncError, ValueError):
    """A configured key or value is wrong."""


class UnsupportedError(TpuSyncError):
    """This build, kernel, file system or SGLang cannot do what was asked."""


class HookError(TpuSyncError):
    """A hook does not fit the installed SGLang."""


class StorageError(TpuSyncError, OSError):
    """The directory or a file of the store cannot be used."""


class TransferError(TpuSyncError):
    """A copy or a transfer failed."""


class DeadlineError(TransferError, TimeoutError):
    """A copy or a transfer took longer than it was given."""


class CancelledError(TransferError):
    """The caller or a close asked a copy or a transfer to stop."""
