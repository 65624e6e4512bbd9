"""Study `stability`: do alarms on attention logits warn before a training diverges?"""
