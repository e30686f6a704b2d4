"""Cut the rows of tables into partitions of bounded accesses and bounded size."""
