"""Compare all bilevel algorithms on decentralized meta-learning."""
