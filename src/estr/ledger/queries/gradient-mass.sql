-- Which tokens move the weights: the 50 token ids with the largest sums of absolute gradient
-- coefficients.
select
    token_ids as token_id,
    count(*) as tokens,
    sum(abs(gradient_coefficient)) as mass,
    sum(gradient_coefficient) as net,
    avg(behavior_entropies) as entropy,
    avg((not kept)::int) as rho_mask
from loss_terms
group by token_ids
order by mass desc nulls last, token_id
limit 50
