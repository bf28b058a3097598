"""Write, resume and read the folders of runs."""
