"""What a run tells: metrics, sinks, progress, samples, the report. Nothing is imported here."""
