"""Store directories as tools see them: what they hold, whether it is whole, and what may go.

Works beside living servers: it takes a directory's lock for moments, and changes no region that has a writer.
"""

from sglang_tpusync.store.check import RegionReport, check_region
from sglang_tpusync.store.clear import Removal, clear_regions, remove_orphans
from sglang_tpusync.store.dram import DramRegionView, DramView, check_dram, clear_dram, read_dram
from sglang_tpusync.store.metrics import prometheus_text
from sglang_tpusync.store.view import Finding, Limits, NamespaceView, RegionView, StoreView, Tree, read_store

__all__ = [
    "DramRegionView",
    "DramView",
    "Finding",
    "Limits",
    "NamespaceView",
    "RegionReport",
    "RegionView",
    "Removal",
    "StoreView",
    "Tree",
    "check_dram",
    "check_region",
    "clear_dram",
    "clear_regions",
    "prometheus_text",
    "read_dram",
    "read_store",
    "remove_orphans",
]
