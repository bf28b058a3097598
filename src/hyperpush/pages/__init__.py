"""Pages: any result as one HTML file that needs no script and no network. The room knows no class of results."""
