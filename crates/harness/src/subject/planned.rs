//! A plan of the library on a GPU, launched as a user would.

use cuda::{Buffer, DeviceAddress, Stream};
use flashcore::gpu::{AttentionPlan, DeviceLists, Gpu, Gradients, Tensors};
use flashcore::plan::Arrangement;
use flashcore::{Error as LibraryError, Pass, Plan};

use super::{Addresses, Call, TensorRole};
use crate::Error;
use crate::auxiliary_inputs::AuxiliaryInputs;

/// A plan with the lists that its calls are given.
#[derive(Debug)]
pub struct Planned {
    plan: AttentionPlan,
    tensors: Tensors,
    /// What the tensors point to.
    _lists: Vec<Buffer>,
}

impl Planned {
    /// Compiles a plan over contiguous tensors.
    pub fn new(gpu: &Gpu, plan: Plan, auxiliary: &AuxiliaryInputs) -> Result<Self, Error> {
        let problem = &plan.problem;
        let nowhere = [DeviceAddress(0); 4];
        let tensors = Tensors::contiguous(problem, nowhere, Some(DeviceAddress(0)));
        let mut tensors = tensors.map_err(LibraryError::from)?;
        let mut lists = DeviceLists::new(gpu);
        if problem.pass == Pass::Backward {
            let Tensors { query, key, value, output, .. } = tensors;
            let sinks = problem.scores.sinks.then(|| lists.numbers(&vec![0; problem.query_heads]));
            let sinks = sinks.transpose()?;
            let lse = problem.lse_gradient.then(|| lists.numbers(&vec![0; problem.rows()]));
            let lse = lse.transpose()?;
            tensors.gradients = Some(Gradients { output, query, key, value, sinks, lse });
        }
        auxiliary.on_device(problem, &mut lists, &mut tensors)?;
        let arrangement = Arrangement::contiguous(problem).map_err(LibraryError::from)?;
        let plan = AttentionPlan::of(gpu, plan, arrangement)?;
        Ok(Planned { plan, tensors, _lists: lists.into_buffers() })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        self.plan.plan()
    }
}

impl Call for Planned {
    fn launch(&mut self, stream: &Stream, addresses: &Addresses) -> Result<(), Error> {
        let at = |role: TensorRole| addresses[role as usize];
        let Tensors { query, key, value, output, gradients, .. } = &mut self.tensors;
        query.address = at(TensorRole::Query);
        key.address = at(TensorRole::Key);
        value.address = at(TensorRole::Value);
        output.address = at(TensorRole::Output);
        if let Some(gradients) = gradients {
            gradients.output.address = at(TensorRole::OutputGradient);
            gradients.query.address = at(TensorRole::QueryGradient);
            gradients.key.address = at(TensorRole::KeyGradient);
            gradients.value.address = at(TensorRole::ValueGradient);
        }
        self.tensors.lse = Some(at(TensorRole::Lse));
        Ok(self.plan.launch(stream, &self.tensors)?)
    }
}
