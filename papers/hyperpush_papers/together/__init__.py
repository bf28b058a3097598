"""All steps on one task: train, learn personal parts and example weights, score records, drop some, continue."""
