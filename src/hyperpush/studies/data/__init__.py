"""The data of the studies: sources, partitions, users' own files."""
