"""Answer questions about a plan (`explain`, `why_not`, `limits`), and find its costs as formulas (`Plan.formula`)."""
