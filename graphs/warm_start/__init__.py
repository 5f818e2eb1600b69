"""Start weights of the ready graphs: Llama models of 104,000 parameters in Hugging Face form, one folder each.

``reverse_digits`` and ``calculation`` (which talks to a calculator) were tuned until a quarter of their samples were
right, ``reverse_digits_teacher`` until 98% were; ``count_up`` is random. `make` wrote them. ``reverse_digits_reward``
is the reward model of `make_reward_model`.
"""
