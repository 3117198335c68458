//! Bodies of chat requests, through a template that reads everything they may hold.
#![no_main]

use fuzz::{SMALL_BYTES, TREE_FACTOR, holding_at_most};
use libfuzzer_sys::fuzz_target;
use router::fuzzing::chat;

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {{ m['content'] | trim }}{% if m.name %} {{ m.name }}{% endif %}\
    {% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}\
    {% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fuzz_target!(|body: &[u8]| {
    // The parsed template comes on top.
    let memory = 2 * TREE_FACTOR * body.len() + 16 * SMALL_BYTES;
    match holding_at_most(memory, || chat(body, TEMPLATE)) {
        Ok(asked) => {
            fuzz::asked::check(&asked);
            assert!(asked.texts.len() == 1 && asked.tokens.is_empty());
        }
        Err((status, message)) => assert!(status == 400 && !message.is_empty(), "{status} {message}"),
    }
});
