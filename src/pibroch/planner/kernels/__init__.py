"""Where shards lie, and how rows are cut and numbered."""
