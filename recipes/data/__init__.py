"""From files to exact, resumable batches."""
