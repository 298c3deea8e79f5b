"""Planning from lengths alone: which steps pack, how many blocks, and how much memory."""
