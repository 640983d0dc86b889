"""Vision-language model families behind one seam; see `cast_rl.judges.families.base`."""
