"""Local differential privacy: noise, how much one example can change what is sent, what it costs, and an attack."""
