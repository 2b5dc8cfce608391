"""From prompts to samples: rollout servers, the client that asks them, and what becomes of the
answers."""
