"""A task: one client's costs and start, all clients' data, and the problem that engines compile from them."""
