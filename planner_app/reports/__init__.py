"""Pictures of results: self-contained HTML pages and traces for Perfetto. Import the modules you need."""
