"""What a worker does with a prompt: watch its layers, score, choose, and pack."""
