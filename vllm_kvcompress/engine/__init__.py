"""The only package that imports vLLM. One module per seam."""
