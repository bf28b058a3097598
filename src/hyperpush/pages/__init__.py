"""Write a result as one HTML page without scripts or network access. This package uses no particular result class."""
