"""Tables in context: a pretrained network that attends across rows, without training."""
