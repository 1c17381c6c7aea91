"""``refitd bench refit --device cuda --gpus N``: layouts over several cards, beside what else would move the bytes."""
