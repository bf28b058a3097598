"""Run folders: their content, and how to write, resume and read them."""
