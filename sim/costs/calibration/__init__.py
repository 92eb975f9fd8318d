"""Fitted step costs: the file that holds them, the costs it predicts, and what they may be used for."""
