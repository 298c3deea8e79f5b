"""Code that published methods use: allocators, selector `topk`, pooling, published parameters."""
