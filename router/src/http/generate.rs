//! The two generation endpoints: body to jobs, jobs to a response.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::try_join_all;
use futures_util::{StreamExt, TryStreamExt};
use kv_block::Token;
use tower_http::timeout::TimeoutError;

use super::bodies::BudgetSpent;
use super::{reply, request_id, route};
use crate::answer::Answer;
use crate::app::{App, InFlight};
use crate::clock;
use crate::metrics::Outcome;
use crate::openai::{
    ApiError, Endpoint, Fields, Messages, Params, PromptInput, ResponseHead, Usage, prompts,
};
use crate::policy::Arm;
use crate::request::{Job, Running};

mod events;

/// Long enough for a refusal to come back, short enough not to be felt: within
/// it errors of a stream still get a status of their own.
const SETTLE: Duration = Duration::from_millis(150);
/// Shorter bodies are read on the spot, in well under a millisecond.
const BLOCKING_FROM_BYTES: usize = 16 << 10;

pub(super) async fn chat(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    generate(app, headers, body, Endpoint::Chat).await
}

pub(super) async fn completion(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    generate(app, headers, body, Endpoint::Completion).await
}

async fn generate(
    app: Arc<App>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
    endpoint: Endpoint,
) -> Response {
    let request_id = request_id::request_id(&headers, clock::random());
    let mut exchange = Exchange::new(app.clone(), request_id.clone());
    let result = respond(&mut exchange, &headers, body, endpoint).await;
    let mut response = match result {
        // A streamed answer has taken the exchange along.
        Ok(response) => response,
        Err(error) => exchange.refuse(&error),
    };
    if let Ok(id) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(request_id::HEADER, id);
    }
    response
}

async fn respond(
    exchange: &mut Exchange,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
    endpoint: Endpoint,
) -> Result<Response, ApiError> {
    let app = exchange.app.clone();
    if app.draining() {
        return Err(ApiError::unavailable("draining", "this server is stopping"));
    }
    let body = whole_body(&app, body)?;
    let arm = route::arm(headers, app.allow_route_override)?;
    let asked = blocking(&app, body.len(), move |app| read(app, &body, endpoint)).await?;
    let model = accepted_model(&app, asked.params.model.as_deref())?;
    check_context(&app, &asked)?;
    let mut answers = place(exchange, &asked, arm).await?;
    if asked.params.stream {
        let deadline = tokio::time::Instant::from_std(clock::now() + SETTLE);
        try_join_all(answers.iter_mut().map(|placed| placed.running.settle(deadline))).await?;
    }
    let decision = answers[0].running.decision();
    let report = route::report(decision, &exchange.request_id);
    exchange.rule = decision.rule;
    let head = ResponseHead::new(endpoint, &exchange.request_id, clock::unix_seconds(), model);
    let answers: Vec<_> = answers.into_iter().map(|placed| placed.into_answer(&app, &asked.params)).collect();
    let mut response = if asked.params.stream {
        exchange.app.metrics.answered(200, exchange.rule);
        events::respond(head, answers, asked.params.include_usage, exchange.take())
    } else {
        let finished = try_join_all(answers.into_iter().map(Answer::collect)).await.inspect_err(|_| {
            exchange.outcome = Outcome::Failed;
        })?;
        exchange.app.metrics.answered(200, exchange.rule);
        exchange.outcome = Outcome::Finished;
        let (choices, usages): (Vec<_>, Vec<_>) = finished.into_iter().unzip();
        reply::json(StatusCode::OK, head.whole(&choices, usages.into_iter().sum()))
    };
    if let Some(report) = report {
        response.headers_mut().insert(route::REPORT, report);
    }
    Ok(response)
}

/// One generation request, from its head to the end of its response; counts
/// itself when it ends, on whatever path that happens.
struct Exchange {
    app: Arc<App>,
    request_id: String,
    accepted: Instant,
    rule: &'static str,
    outcome: Outcome,
    in_flight: Option<InFlight>,
}

impl Exchange {
    fn new(app: Arc<App>, request_id: String) -> Self {
        let in_flight = Some(app.enter());
        Self { app, request_id, accepted: clock::now(), rule: "none", outcome: Outcome::Cancelled, in_flight }
    }

    fn refuse(&mut self, error: &ApiError) -> Response {
        if self.outcome == Outcome::Cancelled {
            self.outcome = Outcome::Refused;
        }
        self.app.metrics.answered(error.status, self.rule);
        let (status, reason) = (error.status, error.code());
        tracing::debug!(request = self.request_id, status, reason, "refused");
        reply::error(error)
    }

    /// The exchange itself, for a response that outlives its handler.
    fn take(&mut self) -> Self {
        Self {
            app: self.app.clone(),
            request_id: self.request_id.clone(),
            accepted: self.accepted,
            rule: self.rule,
            outcome: self.outcome,
            in_flight: self.in_flight.take(),
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if self.in_flight.is_some() {
            self.app.metrics.ended(self.outcome);
            tracing::debug!(request = self.request_id, rule = self.rule, outcome = ?self.outcome, "request ended");
        }
    }
}

pub(super) fn whole_body(app: &App, body: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::body_too_large(app.body_bytes_max),
        _ if caused_by::<TimeoutError>(&rejection) => ApiError::body_too_slow(app.client_timeout),
        _ if caused_by::<BudgetSpent>(&rejection) => ApiError::unavailable("busy", BudgetSpent.to_string()),
        _ => ApiError::malformed("The request body could not be read"),
    })
}

/// Whether `E` is somewhere in the chain of causes.
fn caused_by<E: std::error::Error + 'static>(rejection: &BytesRejection) -> bool {
    let first: &(dyn std::error::Error + 'static) = rejection;
    std::iter::successors(Some(first), |error| error.source()).any(|error| error.is::<E>())
}

/// A checked request with its prompts as tokens.
struct Asked {
    params: Params,
    prompts: Vec<Arc<[Token]>>,
}

/// Most answers that one request may ask for, prompts times choices.
const ANSWERS_MAX: usize = 128;
/// Answers of one request that are placed at the same time.
const PLACED_AT_ONCE: usize = 8;

/// Parses, checks and tokenises.
fn read(app: &App, body: &[u8], endpoint: Endpoint) -> Result<Asked, ApiError> {
    let fields = Fields::parse(body)?;
    let params = Params::read(&fields)?;
    let prompts: Vec<Vec<Token>> = match endpoint {
        Endpoint::Chat => vec![read_tokens(app, &chat_prompt(app, &Messages::read(&fields)?)?)],
        Endpoint::Completion => prompts(&fields, app.vocabulary.size())?
            .into_iter()
            .map(|input| input_tokens(app, input))
            .collect(),
    };
    if prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::invalid("prompt", "The prompt has no tokens"));
    }
    let (count, choices) = (prompts.len(), params.choices as usize);
    if count * choices > ANSWERS_MAX {
        let message = format!(
            "{count} prompts with 'n' = {choices} ask for {} answers, at most {ANSWERS_MAX} are allowed",
            count * choices
        );
        return Err(ApiError::invalid("n", message));
    }
    Ok(Asked { params, prompts: prompts.into_iter().map(Arc::from).collect() })
}

/// Off the async threads where it takes long: large bodies are slow to parse,
/// to render and to tokenise.
pub(super) async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    bytes: usize,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if bytes < BLOCKING_FROM_BYTES {
        return work(app);
    }
    let app = app.clone();
    let result = host::blocking(move || work(&app)).await;
    result.unwrap_or_else(|error| Err(ApiError::internal(error)))
}

pub(super) fn chat_prompt(app: &App, messages: &Messages) -> Result<String, ApiError> {
    let Some(template) = &app.template else {
        let message = "This model has no chat template; use /v1/completions";
        return Err(ApiError::invalid("messages", message));
    };
    template.render(&messages.messages, &messages.template_variables).map_err(|reason| {
        ApiError::invalid("messages", format!("The model's chat template refuses the messages: {reason}"))
    })
}

/// Rendered templates and raw prompts alike: control tokens written as text are
/// such tokens, and there is one BOS where the model wants one.
pub(super) fn read_tokens(app: &App, text: &str) -> Vec<Token> {
    app.vocabulary.tokenize(text, true, true)
}

fn input_tokens(app: &App, input: PromptInput) -> Vec<Token> {
    match input {
        PromptInput::Text(text) => read_tokens(app, &text),
        PromptInput::Tokens(tokens) => tokens,
    }
}

fn accepted_model(app: &App, asked: Option<&str>) -> Result<String, ApiError> {
    let ids = app.model_ids();
    let Some(asked) = asked else { return Ok(app.model.alias.clone()) };
    if ids.contains(&asked) { Ok(asked.to_owned()) } else { Err(ApiError::unknown_model(asked, &ids)) }
}

fn check_context(app: &App, asked: &Asked) -> Result<(), ApiError> {
    let limit = app.context_tokens();
    for prompt in &asked.prompts {
        let needed = prompt.len() + asked.params.max_tokens.unwrap_or(1) as usize;
        if needed > limit {
            return Err(ApiError::context(prompt.len(), asked.params.max_tokens, limit));
        }
    }
    Ok(())
}

/// An answer with a decode node.
struct Placed {
    running: Running,
    /// 0 where another answer to the same prompt counts it.
    prompt_tokens: u64,
}

impl Placed {
    fn into_answer(self, app: &App, params: &Params) -> Answer {
        Answer::new(app.vocabulary.clone(), self.running, &params.stops, self.prompt_tokens)
    }
}

/// Every answer of the request on a decode node: prompts in order, and for each
/// its choices in order.
async fn place(exchange: &Exchange, asked: &Asked, arm: Option<Arm>) -> Result<Vec<Placed>, ApiError> {
    let (app, params) = (&exchange.app, &asked.params);
    let seed = params.seed.unwrap_or_else(clock::random);
    let choices = params.choices;
    let each = asked.prompts.iter().flat_map(|prompt| (0..choices).map(move |choice| (prompt, choice)));
    let mut starts = Vec::new();
    for (index, (prompt, choice)) in (0u64..).zip(each) {
        let mut sampling = params.sampling.clone();
        sampling.seed = seed.wrapping_add(index);
        let job = Job {
            request_id: exchange.request_id.clone(),
            tokens: prompt.clone(),
            sampling,
            max_tokens: params.max_tokens,
            ignore_end: params.ignore_end,
            isolation: params.isolation,
            arm,
            accepted: exchange.accepted,
        };
        let prompt_tokens = if choice == 0 { prompt.len() as u64 } else { 0 };
        app.metrics.prompt_tokens.increment(prompt_tokens);
        starts.push(start(app.clone(), job, prompt_tokens));
    }
    futures_util::stream::iter(starts).buffered(PLACED_AT_ONCE).try_collect().await
}

async fn start(app: Arc<App>, job: Job, prompt_tokens: u64) -> Result<Placed, ApiError> {
    Ok(Placed { running: Running::start(app, job).await?, prompt_tokens })
}

impl std::iter::Sum for Usage {
    fn sum<I: Iterator<Item = Self>>(usages: I) -> Self {
        usages.fold(Self::default(), |sum, usage| Self {
            prompt_tokens: sum.prompt_tokens + usage.prompt_tokens,
            completion_tokens: sum.completion_tokens + usage.completion_tokens,
            cached_tokens: sum.cached_tokens + usage.cached_tokens,
        })
    }
}
