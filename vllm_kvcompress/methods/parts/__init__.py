"""Code that published methods share: allocator `uniform`, selector `topk`, aggregates, pooling."""
