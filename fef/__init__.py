"""fef, the fluidic-expert-fabric: Mixture-of-Experts Transformers over one pooled, globally addressed memory."""
