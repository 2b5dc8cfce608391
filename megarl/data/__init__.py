"""What is trained on: prompts, demonstrations, rewards, recorded rollouts; packing into rows."""
