"""Which training examples help or hurt everyone: predicted, and checked by retraining without them."""
