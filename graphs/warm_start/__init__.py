"""Start weights of the ready graphs: Llama models of 104,000 parameters in Hugging Face form, one folder each.

``reverse_digits`` was tuned until a quarter of its samples were right; ``count_up`` is random. `make` wrote both.
"""
