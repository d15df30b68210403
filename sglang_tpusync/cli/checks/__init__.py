"""What `tpusync doctor` checks, one module per subject; each check answers results and never raises."""

from __future__ import annotations

__all__: list[str] = []
