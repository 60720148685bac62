"""The scheduler core: plain functions of recorded inputs. It decides; the shell around it acts."""
