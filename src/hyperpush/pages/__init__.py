"""Pages: any result as one HTML file that needs no script and no network. The room does not depend on any class of
results."""
