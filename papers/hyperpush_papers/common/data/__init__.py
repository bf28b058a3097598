"""The data of the studies: sources and partitions."""
