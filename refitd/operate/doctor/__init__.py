"""``refitd doctor``: whether this node is fit for refits. Facts are gathered first; checks only judge them."""
