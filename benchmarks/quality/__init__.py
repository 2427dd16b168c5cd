"""Parts of benchmarks/plan_quality.py: its models, its peers and its pictures."""
