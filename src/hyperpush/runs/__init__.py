"""Run folders: what they hold, how they are written, resumed and read back."""
