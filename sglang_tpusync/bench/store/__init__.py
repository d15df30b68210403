"""`tpusync bench store`: pages to the disk and cold from it, beside fio and beside what others do."""
