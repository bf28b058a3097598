"""Read and check TOML files and options, run them as studies, and write them back as TOML."""
