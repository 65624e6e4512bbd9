"""Head roles: previous-token, induction, duplicate-token, sink and other heads, by their attention patterns."""
