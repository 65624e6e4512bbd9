"""EventModel: continuous-time event sequences."""
